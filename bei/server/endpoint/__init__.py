"""What all routes share: parsing, fields, the model that is meant, inference, rendering."""
