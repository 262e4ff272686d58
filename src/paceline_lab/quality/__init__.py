"""How far an arithmetic is from float32."""
