"""The modes that see every op and storage; stand-ins; causes."""
