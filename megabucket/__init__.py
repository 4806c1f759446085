"""Megabucket."""
