"""Tools of the developers, which are not installed with the product."""
