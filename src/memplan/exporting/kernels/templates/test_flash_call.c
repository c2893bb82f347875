    if (!is_read()) {
        printf("%s cannot be read\n", FLASH_FILE);
        return 2;
    }
