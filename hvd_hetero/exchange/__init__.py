"""What travels between ranks; knows collectives only through a protocol."""
