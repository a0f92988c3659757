"""Make HTML pages of charts, tables and coloured tokens; `report` and `view` share them."""
