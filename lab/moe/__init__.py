"""What drafting costs and gains on a mixture of experts, beside a dense twin (`python -m lab moe`)."""
