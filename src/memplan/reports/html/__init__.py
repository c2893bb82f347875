"""HTML of results: self-contained pages with charts, and static tables for notebooks."""
