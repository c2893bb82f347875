"""The version of memplan, for those who cannot import the package itself."""

__version__ = "0.1.0"
