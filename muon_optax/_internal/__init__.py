"""What every room uses and no user imports: paths of trees, dtypes, checks of arguments."""
