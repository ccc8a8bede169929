"""The training recipe of the small byte-level model that ships with jspec."""
