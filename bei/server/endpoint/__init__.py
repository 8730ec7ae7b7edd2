"""Shared by all routes: parsing, fields, the choice of the model, inference, rendering."""
