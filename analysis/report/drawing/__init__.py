"""What a page is drawn with: HTML elements, numbers and tables, axes, charts, and the figure that holds them."""
