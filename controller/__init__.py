"""The controller process: plans block tables and knows every cached prefix."""
