"""Turn results into output: terminal tables, JSON, HTML, charts, CI formats; a module for each kind of result."""
