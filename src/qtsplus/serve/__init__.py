"""The page, the MCP server, and what stands in front of any server."""
