"""bei beside other libraries and servers: the same texts, the same client, the same cores, in turn."""
