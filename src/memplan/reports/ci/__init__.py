"""What is found, for systems that run commands on every change: SARIF, annotations of GitHub Actions, JUnit."""
