"""What is known of each server, as data: how it is recognised and which markers it leaves."""
