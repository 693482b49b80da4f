"""What scheduling produces, as data: the plan, its kernels and steps, and questions about them."""
