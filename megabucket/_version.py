"""The version of the package, where every file of it may import it from."""

__version__ = "0.1.0"
