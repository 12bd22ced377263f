"""Rival explanations of what was measured on 8 RTX PRO 6000, fitted to the same figures."""
