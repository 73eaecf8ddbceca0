"""Helpers of all packages, which no user imports: paths of trees, dtypes, checks of arguments."""
