"""The wait-for graph, built without a database and drawn as SVG, for the command line and for the dashboard."""
