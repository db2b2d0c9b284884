"""Figures, drawn: for a terminal, and as a page of HTML."""
