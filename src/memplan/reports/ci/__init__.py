"""Reports for CI systems: SARIF, GitHub Actions annotations, JUnit."""
