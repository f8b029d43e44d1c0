"""How long a model takes by the heads that are open: measured tables, limits in time, and gates that are held to one."""
