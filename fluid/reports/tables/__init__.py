"""Tables for terminals and for the HTML page."""
