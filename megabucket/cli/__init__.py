"""The command line: one file per command, no logic beyond calling the library and printing."""
