"""Pages that need nothing but themselves: HTML and charts as inline SVG, for certificates and benchmarks. No script."""
