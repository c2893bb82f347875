"""A recorded step run again from its ops alone, with other arguments: what each storage would take then."""
