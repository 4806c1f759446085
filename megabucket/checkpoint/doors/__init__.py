"""Ways into other formats and out of them: each file knows one of them, and is imported only by who wants it."""
