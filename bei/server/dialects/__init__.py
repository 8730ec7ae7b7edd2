"""APIs of other servers, one module a dialect: wire types by the names of that API, handlers, error bodies."""
