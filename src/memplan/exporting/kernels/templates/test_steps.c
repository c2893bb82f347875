#ifdef STEPS_FILE
    FILE *steps = fopen(STEPS_FILE, "wb");
#endif
