"""What is shown and kept: rows, tables, figures and pages."""
