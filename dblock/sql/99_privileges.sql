-- Nobody but the owner may call anything until `dblock grant ROLE` says so.
DO $$
BEGIN
    EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', current_schema());
END
$$;
