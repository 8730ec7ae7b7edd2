"""How far an engine is from a reference: asking it, comparing its answers, and keeping a reference's for later."""
