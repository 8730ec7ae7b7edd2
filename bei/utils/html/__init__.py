"""Pages and charts as HTML and inline SVG, without scripts."""
