"""Weights that leave a wrapper in chunks, and come back: ``chunk`` is for receivers, ``export`` and ``load`` for a wrapper."""
