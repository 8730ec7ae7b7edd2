"""Scripts that measure, each writing JSON; README.md says how every published number was made."""
