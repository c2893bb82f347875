/* What a Cortex-M needs to run a program under semihosting, and a count of what it ran: SysTick. */
#include <stdint.h>

extern int main(void);
extern void exit(int);
extern void initialise_monitor_handles(void);
extern uint32_t stack_top, bss_start, bss_end;

#define REGISTER(at) (*(volatile uint32_t *)(at))

uint32_t ticks(void)
{
    return 0xFFFFFF - REGISTER(0xE000E018);
}

void _init(void) {}
void _fini(void) {}

static void start(void)
{
    REGISTER(0xE000ED88) |= 0xF << 20; /* the floating-point unit */
    for (uint32_t *p = &bss_start; p < &bss_end; p++)
        *p = 0;
    REGISTER(0xE000E014) = 0xFFFFFF; /* SysTick: from here down, at the processor's clock */
    REGISTER(0xE000E018) = 0;
    REGISTER(0xE000E010) = 5;
    initialise_monitor_handles();
    exit(main());
}

static void stop(void)
{
    exit(3);
}

__attribute__((section(".vectors"), used)) static void *const vectors[16] = {
    &stack_top, (void *)start, (void *)stop, (void *)stop, (void *)stop, (void *)stop, (void *)stop,
};
