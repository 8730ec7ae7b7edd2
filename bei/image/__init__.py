"""Images of requests: from encoded bytes to the patches that an engine reads. Only this room decodes images."""
