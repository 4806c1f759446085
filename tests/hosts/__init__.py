"""Two hosts on one machine, to try what needs more than one: Linux namespaces joined by a link that can be cut."""
