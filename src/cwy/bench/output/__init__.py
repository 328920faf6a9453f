"""Show and keep what was measured: rows, tables, figures and pages."""
