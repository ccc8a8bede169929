"""Attention over a cache: of all that is there, of a selection, and the merge of two parts."""
