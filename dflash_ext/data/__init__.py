"""From conversations to batch plans: read and mask text, group it by length, plan each batch."""
