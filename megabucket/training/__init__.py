"""The program behind ``megabucket train``: corpus, byte-level GPT, loop, figures. Nothing else depends on it."""
