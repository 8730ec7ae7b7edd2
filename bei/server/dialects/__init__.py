"""APIs of other servers, one module a dialect: wire types, handlers, error bodies."""
