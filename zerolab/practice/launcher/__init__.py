"""Ranks beside a notebook, on any system and after any accident: what `World` is made of."""
