"""To and from the formats of others."""
