"""What ``make demo`` trains: a byte-level GPT on the standard library's source, with megabucket used as by anybody."""
