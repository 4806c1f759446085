"""Measurements on the ranks of a run: what a link costs, and when gradients are ready. Knows torch."""
