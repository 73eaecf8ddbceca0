"""Where matrices lie and how they are brought together: the only package that knows a mesh."""
