"""How far an engine's answers are from a reference, in figures."""
